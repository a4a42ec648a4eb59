"""Plan of jobs as a pure function of jobs, slots and what was planned before."""
