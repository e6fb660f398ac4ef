//! The database that two sidecars share. It does not belong to the demonstration, so the demonstration changes only its own
//! records.

/// The service name that keeps the records of a demonstration apart from those of real services.
pub(crate) const SERVICE: &str = "oncegate-demo";

/// The retention of the records. It is short, because they stay in the database after the demonstration.
pub(crate) const RETENTION: &str = "1h";

/// A store on a server, for two sidecars.
#[derive(Clone)]
pub struct SharedStore {
    /// The URL. It may contain a password, so it is passed to the sidecars in their environment and nowhere else.
    pub(crate) url: String,
    /// The URL without its password.
    pub(crate) shown: String,
    /// A path that no other run uses, so that each record under it belongs to this run.
    pub(crate) path: String,
}

impl SharedStore {
    /// Uses the store at `url`. `shown` is printed instead of the URL and must not contain a password.
    pub fn new(url: impl Into<String>, shown: impl Into<String>) -> Self {
        let since = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default();
        let path = format!("/demo-{:x}-{:x}/payments", since.as_micros(), std::process::id());
        Self { url: url.into(), shown: shown.into(), path }
    }

    /// The operation in the records of this run, encoded for a URL.
    pub(crate) fn operation(&self) -> String {
        format!("POST%20{}", self.path)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_runs_use_different_paths() {
        let [one, other] = [(); 2].map(|()| {
            std::thread::sleep(std::time::Duration::from_millis(1));
            SharedStore::new("redis://db", "redis://db")
        });
        assert_ne!(one.path, other.path);
    }
}
