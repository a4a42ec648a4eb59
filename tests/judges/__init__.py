"""What must stay equal while code is restructured: recorded at one commit, compared at another.

`python -m tests.judges record FOLDER`, later `... compare FOLDER`; `--only results,ports`: these judges alone.

results  `--json` of every shipped scenario and demo, simulated under fixed seeds
plans    decisions of every policy on shipped scenarios, and of every planner on the views of its contract
replays  two recorded decisions of each policy, kept whole, and the answer of `trefoil replay` to them
up       launch, argument lists, order of start and settings files of `trefoil up` and of every demo
compose  .env by profile, docker-compose.yml; swarm: the stack, and every file that is mounted
wire     schema of every message and RPC, bytes of one value of each kind in Redis, keys, signatures
help     `--help` of every command; json: `--json` of each, without a system
ports    calls of the controller's cores; bytes that services write to Redis, disks and agents, under faults

Not recorded, because it needs a running system: answers of a live `up`, frames of HTTP/1.1 and HTTP/2, images.
"""
