"""What an open GPU and a reset prove, pure."""
