"""From a ticket to a complete group: rollouts and conversations."""
