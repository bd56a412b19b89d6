"""SimAI and AICB: their workload and kernel-time files, SimAI-Analytical's arithmetic, and what ours says of the same files."""
