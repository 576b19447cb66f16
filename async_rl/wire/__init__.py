"""What crosses between processes: keys, requests and replies, and memory that processes of one host
share.
"""
