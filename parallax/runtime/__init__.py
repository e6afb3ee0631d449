"""Machine and process: errors, files, devices, versions, progress, and the processes of a job."""
