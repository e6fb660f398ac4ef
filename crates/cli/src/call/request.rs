//! Builds an intent from the flags.

use std::fs;
use std::io::Read;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use http::Method;
use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use oncegate_client::{Carrier, IdempotencyKey, Intent};

use super::args::CallArgs;
use crate::files;

/// The largest body of a request, in bytes. It is held in memory, and a journal entry has at most 16 MiB altogether.
const MAX_BODY: usize = 15 * 1024 * 1024;

/// Fields that define the end of a message. The HTTP library sets them.
const FRAMING: [HeaderName; 3] = [header::CONTENT_LENGTH, header::TRANSFER_ENCODING, header::CONNECTION];

pub(super) struct Request {
    pub(super) intent: Intent,
    /// True if the key was generated: a restart would generate another one.
    pub(super) is_new_key: bool,
}

/// Reads the request from the arguments.
pub(super) fn read(args: &CallArgs, stdin: &mut impl Read) -> Result<Request, String> {
    let (Some(method), Some(url)) = (&args.method, &args.url) else {
        return Err("give the method and the address".to_owned());
    };
    let intent = Intent::new(method.clone(), url.clone()).map_err(|error| error.to_string())?;
    let intent = match (&args.intent, &args.key) {
        (Some(identity), _) => {
            let key = IdempotencyKey::derived("oncegate call", [identity]);
            intent.with_key(key).map_err(|error| error.to_string())?
        }
        (None, Some(key)) => intent.with_key(key).map_err(|error| format!("--key: {error}"))?,
        (None, None) => intent,
    };
    let is_safe = matches!(*method, Method::GET | Method::HEAD | Method::OPTIONS | Method::TRACE);
    let is_new_key = args.intent.is_none() && args.key.is_none() && !is_safe;
    let mut fields = fields(args)?;
    let mut set_default = |name: HeaderName, value: &'static str| {
        fields.entry(name).or_insert(HeaderValue::from_static(value));
    };
    set_default(header::USER_AGENT, concat!("oncegate/", env!("CARGO_PKG_VERSION")));
    let body = if let Some(json) = &args.json {
        set_default(header::CONTENT_TYPE, "application/json");
        set_default(header::ACCEPT, "application/json");
        body_bytes("--json", json, stdin)?
    } else if let Some(data) = &args.data_binary {
        set_default(header::CONTENT_TYPE, "application/x-www-form-urlencoded");
        body_bytes("--data-binary", data, stdin)?
    } else if args.data.is_empty() {
        Vec::new()
    } else {
        set_default(header::CONTENT_TYPE, "application/x-www-form-urlencoded");
        let mut joined = Vec::new();
        for (number, data) in args.data.iter().enumerate() {
            if number > 0 {
                joined.push(b'&');
            }
            let read = body_bytes("--data", data, stdin)?;
            let is_file = data.starts_with('@') || data == "-";
            // As in curl: line ends belong to the file and not to the form.
            joined.extend(read.into_iter().filter(|byte| !is_file || !matches!(byte, b'\r' | b'\n' | 0)));
        }
        joined
    };
    if body.len() > MAX_BODY {
        return Err(format!("the body has more than {} MiB", MAX_BODY / 1024 / 1024));
    }
    Ok(Request { intent: intent.with_headers(fields).with_body(body), is_new_key })
}

/// The fields that were given, with those that a journal does not keep.
pub(super) fn fields(args: &CallArgs) -> Result<HeaderMap, String> {
    let mut fields = HeaderMap::new();
    for given in &args.headers {
        match given.strip_prefix('@') {
            None => add(args, &mut fields, given, "--header")?,
            Some(file) => {
                let text = files::read_text(std::path::Path::new(file), files::MAX_TEXT);
                let text = text.map_err(|error| format!("--header @{file}: {error}"))?;
                let place = format!("--header @{file}");
                for line in text.lines().filter(|line| !line.trim().is_empty()) {
                    add(args, &mut fields, line, &place)?;
                }
            }
        }
    }
    if let Some(user) = &args.user {
        if !user.contains(':') {
            return Err("--user: write user and password, with a colon between them".to_owned());
        }
        let basic = format!("Basic {}", STANDARD.encode(user));
        let mut value = HeaderValue::from_str(&basic).map_err(|_| "--user: cannot be sent".to_owned())?;
        value.set_sensitive(true);
        if fields.insert(header::AUTHORIZATION, value).is_some() {
            return Err("--user and a field Authorization exclude each other; leave one out".to_owned());
        }
    }
    Ok(fields)
}

/// Adds a field. An error never contains its value.
fn add(args: &CallArgs, fields: &mut HeaderMap, line: &str, place: &str) -> Result<(), String> {
    let (name, value) = line.split_once(':').ok_or(format!("{place}: write \"Name: value\""))?;
    let name: HeaderName =
        name.trim().parse().map_err(|_| format!("{place}: the name of the field has invalid characters"))?;
    if name == args.carrier {
        return Err(format!("{place}: give the key with --key or --intent"));
    }
    if FRAMING.contains(&name) {
        return Err(format!("{place}: {name} cannot be set; it is derived from the body"));
    }
    let value = HeaderValue::from_str(value.trim())
        .map_err(|_| format!("{place}: the value of {name} cannot be sent"))?;
    fields.append(name, value);
    Ok(())
}

pub(super) fn carrier(args: &CallArgs) -> Carrier {
    let bare = Carrier::named(args.carrier.clone());
    if args.quoted { bare.quoted() } else { bare }
}

/// The text itself, the content of the file after an @, or the standard input.
fn body_bytes(flag: &str, given: &str, stdin: &mut impl Read) -> Result<Vec<u8>, String> {
    let mut bytes = Vec::new();
    let most = MAX_BODY as u64 + 1;
    match given.strip_prefix('@') {
        _ if given == "-" || given == "@-" => {
            let read = stdin.take(most).read_to_end(&mut bytes);
            read.map_err(|error| format!("{flag} -: {error}"))?;
        }
        Some(file) => {
            let read = fs::File::open(file).and_then(|file| file.take(most).read_to_end(&mut bytes));
            read.map_err(|error| format!("{flag} @{file}: {error}"))?;
        }
        None => bytes.extend_from_slice(given.as_bytes()),
    }
    Ok(bytes)
}
