"""A running system looked at and controlled (`status`, `plan`, `freeze`, `node`, `decisions`, ...)."""
