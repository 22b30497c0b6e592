"""`make bench`: everybody's train steps in turn on one machine, and what surrounds ours."""
