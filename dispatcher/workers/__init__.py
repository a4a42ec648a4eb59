"""Workers of one dispatcher, and replicas: supervision, and requests that another one has credits for."""
