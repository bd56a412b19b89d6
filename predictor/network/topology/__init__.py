"""Networks of clusters as graphs: made from templates, written to and read from SimAI's topology files, drawn."""
