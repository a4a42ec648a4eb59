"""InfAdapter (EuroMLSys 23): variants and sizes by an integer program, and what its paper compares it with."""
