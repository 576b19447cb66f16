"""The verifier: an HTTP server that judges programs and answers, and its client."""
