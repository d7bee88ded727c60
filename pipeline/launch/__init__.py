"""From planned runs to Ray jobs and back: cluster, submission, following, stopping, display. Knows `study` only."""
