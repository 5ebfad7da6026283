"""Events that keep coming: from files that are moved into a folder, or from a Kafka topic. Windows
of them close in order of time, and each is on disk before it is trained."""
