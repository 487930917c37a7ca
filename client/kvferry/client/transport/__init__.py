"""The client's two sockets: ZeroMQ for messages, a Unix socket for file descriptors."""
