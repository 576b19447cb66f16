"""The requests and answers of other APIs: one file each, with one form per path."""
