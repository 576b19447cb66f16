"""Programs with the packages of other projects as clients of the endpoint."""
