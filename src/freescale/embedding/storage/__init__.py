"""Where the rows of a rank lie: on the device, behind a cache, or coming and going."""
