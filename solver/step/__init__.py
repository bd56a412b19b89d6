"""A step put together: pricing, overlap, once-a-step work, time and memory."""
