"""One request on its way: admitted, queued, sent to a slice, tried again, answered."""
