"""What the loss may have besides the reconstruction: files of terms, which register themselves (`coders.parts`)."""
