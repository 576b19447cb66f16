"""From groups to forward passes: `batch` flattens groups, `partition` divides sequences among
passes, `packing` builds the packed rows.
"""
