"""A training service that speaks the Tinker API (docs/service.md): programs of others send samples,
losses and steps; adapters of several users are trained beside each other on one base model.

The gateway's process has the HTTP front and the table of requests, rank 0 of the learner executes
the requests of training runs, and the generators sample.
"""
