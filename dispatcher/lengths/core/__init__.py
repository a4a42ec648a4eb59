"""What decides about predicted lengths: values in, values out."""
