/* Wall clock that a test may step, one process at a time: loaded before libc by LD_PRELOAD (benchmarks/chaos_clock.py).

   The file named by WALL_STEPS holds pairs of 64-bit integers, process id (0 = everybody) and seconds; what a process
   reads of CLOCK_REALTIME is moved by those that are for it. Time that never jumps is left alone. */

#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define PAIRS 64

static volatile const long long *pairs;

__attribute__((constructor)) static void open_steps(void) {
    const char *path = getenv("WALL_STEPS");
    int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (fd < 0) return;
    void *found = mmap(0, PAIRS * 16, PROT_READ, MAP_SHARED, fd, 0);
    close(fd);
    if (found != MAP_FAILED) pairs = found;
}

static long long step_s(void) {
    if (!pairs) return 0;
    long long total = 0, me = getpid();
    for (int i = 0; i < PAIRS; i++)
        if (pairs[2 * i + 1] && (pairs[2 * i] == 0 || pairs[2 * i] == me)) total += pairs[2 * i + 1];
    return total;
}

int clock_gettime(clockid_t id, struct timespec *at) {
    int failed = syscall(SYS_clock_gettime, id, at);
    if (!failed && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) at->tv_sec += step_s();
    return failed;
}

int gettimeofday(struct timeval *restrict at, void *restrict zone) {
    struct timespec now;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &now);
    at->tv_sec = now.tv_sec;
    at->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *at) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at) *at = now.tv_sec;
    return now.tv_sec;
}
