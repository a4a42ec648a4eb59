"""One machine's system: services started, watched and stopped (`up`, `down`)."""
