"""A run seen from outside: which runs exist, control, status, metrics, samples, forecast, view."""
