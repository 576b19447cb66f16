"""From groups to forward passes: `batch` flattens groups, `partition` deals sequences out,
`packing` builds the packed rows.
"""
