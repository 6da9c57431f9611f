"""Numbers -> records -> tables and plots. Knows neither pipelines nor codecs."""
