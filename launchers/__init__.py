"""Where runs are started from: composition of the configuration, the command line, and the places
processes run.
"""
