"""What is asked of a deployment and what is made of the answers: lengths, arrivals, links, statistics, records."""
