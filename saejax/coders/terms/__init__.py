"""Terms that the loss may have besides the reconstruction: they register themselves (`coders.parts`)."""
