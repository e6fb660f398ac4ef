//! The service of the benchmarks with axum-idempotent around it, as its README shows. What it stores, it stores in a
//! session, which it never begins by itself: `POST /session` does, and gives the cookie.

#[path = "../../../src/service.rs"]
mod service;

use std::sync::Arc;

use axum::routing::post;
use axum_idempotent::{IdempotentLayer, IdempotentOptions};
use ruts::store::Ttl;
use ruts::store::moka::MokaStore;
use ruts::{CookieOptions, Session, SessionLayer};
use tower_cookies::CookieManagerLayer;

// As in the program that it is compared with.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let store = Arc::new(MokaStore::builder().build());
    let options = IdempotentOptions::default()
        .use_idempotency_key_header(Some("Idempotency-Key"), true)
        .expire_after(60 * 5);
    let begin = |session: Session<MokaStore>| async move {
        let day = Ttl::new(86_400).expect("a day is a time to live");
        session.set("caller", &"bench", day, None).await.map_err(|error| error.to_string())
    };
    let app = service::service()
        .layer(IdempotentLayer::<MokaStore>::new(options))
        .route("/session", post(begin))
        .layer(SessionLayer::new(store).with_cookie_options(CookieOptions::build().name("session")))
        .layer(CookieManagerLayer::new());
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    println!("listening on http://{}", listener.local_addr()?);
    Ok(axum::serve(listener, app).await?)
}
