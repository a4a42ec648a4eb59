"""What the dispatcher decides, without a clock, a loop or a socket: the live process and the simulator run the same."""
