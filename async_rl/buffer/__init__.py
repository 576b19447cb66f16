"""The replay buffer: admission, tickets, replay and the store behind them."""
