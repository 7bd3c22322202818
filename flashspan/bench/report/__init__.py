"""Tables, plots, findings and pages made from measured rows."""
