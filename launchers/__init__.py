"""The start of runs: composition of the configuration, the command line, and the backends that run
processes.
"""
