"""The media that weights travel through, one file each."""
