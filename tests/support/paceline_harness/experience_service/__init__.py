"""The experience service on a real store, with clients that act as trainer and worker."""
