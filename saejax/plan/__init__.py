"""What an experiment takes, tried and predicted before it runs."""
