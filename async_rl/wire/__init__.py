"""Communication between processes: addresses, keys, requests and replies."""
