//! Where two sidecars keep their records together: somebody else's database, in which nothing but what the demonstration
//! made is touched.

use crate::config::{StoreChoice, read_store};

/// The name that keeps the records of a demonstration apart from those of services.
pub(super) const SERVICE: &str = "oncegate-demo";

/// How long the records of a demonstration stay in a database that is not its own.
pub(super) const RETENTION: &str = "1h";

/// A database for two sidecars.
#[derive(Clone)]
pub(super) struct Shared {
    /// There may be a password in it: it goes to the sidecars in their environment, and nowhere else.
    pub(super) url: String,
    /// The same for people.
    pub(super) shown: String,
    /// What nobody else asks for, so that no record of this run is anybody else's.
    pub(super) path: String,
}

impl Shared {
    /// Reads what `--store` says.
    pub(super) fn read(text: &str) -> Result<Self, String> {
        let choice = read_store(text).map_err(|error| format!("--store: {error}"))?;
        if matches!(choice.store(), StoreChoice::Memory | StoreChoice::Directory(_)) {
            return Err("--store: two sidecars cannot share a store in memory or in a directory; name a database \
                        such as redis://HOST or postgres://USER@HOST/DATABASE, or leave it out to see one sidecar \
                        that is killed and started again on its own directory"
                .to_owned());
        }
        let shown = choice.to_string();
        let since = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default();
        let path = format!("/demo-{:x}-{:x}/payments", since.as_micros(), std::process::id());
        Ok(Self { url: text.to_owned(), shown, path })
    }

    /// What the records of this run say that they are about, as it is asked for in a URL.
    pub(super) fn operation(&self) -> String {
        format!("POST%20{}", self.path)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_store_of_one_process_is_refused_with_words() {
        for text in ["memory:", "records", "./records"] {
            let Err(error) = Shared::read(text) else { panic!("{text} was taken") };
            assert!(error.contains("two sidecars cannot share") && error.contains("redis://"), "{error}");
        }
        let Err(error) = Shared::read("mysql://root:hunter2@db/shop") else { panic!("it was taken") };
        assert!(error.starts_with("--store: ") && !error.contains("hunter2"), "{error}");
    }

    #[test]
    fn a_password_is_not_shown_and_no_run_has_the_records_of_another() {
        for url in ["redis://app:hunter2@db/1", "postgres://app:hunter2@db/shop"] {
            let [one, other] = [(); 2].map(|()| {
                std::thread::sleep(std::time::Duration::from_millis(1));
                Shared::read(url).unwrap_or_else(|error| panic!("{error}"))
            });
            assert!(one.shown.contains("db") && !one.shown.contains("hunter2"), "{}", one.shown);
            assert_ne!(one.path, other.path);
        }
    }
}
