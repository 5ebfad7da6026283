"""Trained models as recommenders: for Python, and as folders for serving."""
