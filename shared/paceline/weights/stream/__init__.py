"""The chunk stream between two peers: frames, reader, writer, and deltas on the fly."""
