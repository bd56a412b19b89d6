"""YAML experiments of AMD's Primus."""
