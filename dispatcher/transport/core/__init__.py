"""What gRPC writes into HTTP/2: pure, without a socket."""
