"""gRPC servicers: convert between messages and the types of the rest of the service."""
