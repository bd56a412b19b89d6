"""Pipeline schedules: closed forms, op orders, event simulation."""
