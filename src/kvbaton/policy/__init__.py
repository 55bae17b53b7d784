"""Router choices: pure functions from a frozen view of the fleet to a decision."""
