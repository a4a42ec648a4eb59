"""Role of the leader: who has it, and what its holder keeps on disk and in Redis."""
