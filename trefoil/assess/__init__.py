"""Assessment of a fleet from the metrics that it has: what it costs, what each lever would save (`trefoil assess`)."""
