"""Other ways to train over slow links, each as its authors show it."""
