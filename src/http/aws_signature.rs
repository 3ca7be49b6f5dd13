//! Signature Version 4 of AWS for requests to upstreams, so that clients need no keys of AWS.

use std::fmt;

use aws_lc_rs::digest::{SHA256, digest};
use aws_lc_rs::hmac::{HMAC_SHA256, Key, sign};
use data_encoding::HEXLOWER;
use http::header::{AUTHORIZATION, HOST, HeaderMap, HeaderName, HeaderValue};
use http::{Method, Uri};
use jiff::Timestamp;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};

/// All characters except those that AWS does not encode.
const ENCODED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'_').remove(b'.').remove(b'~');

/// The path is encoded again, except for its separators.
const ENCODED_IN_PATH: &AsciiSet = &ENCODED.remove(b'/');

const DATE: &str = "x-amz-date";
const CONTENT_HASH: &str = "x-amz-content-sha256";
const SESSION_TOKEN: &str = "x-amz-security-token";

/// The hash of a body that is not in memory. Only some services accept it, such as S3.
const UNSIGNED: &str = "UNSIGNED-PAYLOAD";

/// Signs requests with the keys of the configuration.
#[derive(Clone, PartialEq, Eq)]
pub struct AwsSigner {
    /// ID of the access key.
    pub access_key: Box<str>,
    /// The secret of the access key.
    pub secret_key: Box<str>,
    /// The token of temporary keys.
    pub session_token: Option<HeaderValue>,
    /// Region, such as `us-east-1`.
    pub region: Box<str>,
    /// Signing name of the service, such as `bedrock`.
    pub service: Box<str>,
}

/// The secrets are not shown.
impl fmt::Debug for AwsSigner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AwsSigner")
            .field("region", &self.region)
            .field("service", &self.service)
            .finish_non_exhaustive()
    }
}

impl AwsSigner {
    /// Set the headers of the signature. `hash` is the [`content_hash`] of the body. Headers of AWS that the client has
    /// sent are removed, because the keys of the gateway would sign them.
    pub fn sign(&self, method: &Method, uri: &Uri, headers: &mut HeaderMap, hash: &str, now_us: u64) {
        let of_aws = |name: &&HeaderName| name.as_str().starts_with("x-amz-");
        let names: Vec<_> = headers.keys().filter(of_aws).cloned().collect();
        for name in names {
            headers.remove(name);
        }
        let time = Timestamp::from_microsecond(now_us as i64).unwrap_or_default();
        let date = time.strftime("%Y%m%dT%H%M%SZ").to_string();
        let host = headers.get(HOST).cloned().unwrap_or_else(|| HeaderValue::from_static(""));
        let mut signed = vec![("host", host)];
        let mut set = |name: &'static str, value: HeaderValue| {
            headers.insert(HeaderName::from_static(name), value.clone());
            signed.push((name, value));
        };
        // Both values consist of ASCII characters. The names are in the order that the signature requires.
        let header = |text: &str| HeaderValue::from_str(text).unwrap_or(HeaderValue::from_static(""));
        set(CONTENT_HASH, header(hash));
        set(DATE, header(&date));
        if let Some(token) = &self.session_token {
            set(SESSION_TOKEN, token.clone());
        }
        let authorization = self.authorization(method, uri, &signed, hash, &date);
        headers.insert(AUTHORIZATION, header(&authorization));
    }

    /// Return the value of `Authorization`. `signed` contains the signed headers in the order of their names.
    fn authorization(
        &self,
        method: &Method,
        uri: &Uri,
        signed: &[(&str, HeaderValue)],
        hash: &str,
        date: &str,
    ) -> String {
        let headers: String = signed
            .iter()
            .map(|(name, value)| format!("{name}:{}\n", String::from_utf8_lossy(value.as_bytes()).trim()))
            .collect();
        let names = signed.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(";");
        // All services except S3 encode the path once more.
        let path = match &*self.service {
            "s3" => uri.path().to_owned(),
            _ => utf8_percent_encode(uri.path(), ENCODED_IN_PATH).to_string(),
        };
        let query = canonical_query(uri.query().unwrap_or_default());
        let request = format!("{method}\n{path}\n{query}\n{headers}\n{names}\n{hash}");
        let AwsSigner { access_key, secret_key, region, service, .. } = self;
        let day = date.split('T').next().unwrap_or_default();
        let scope = format!("{day}/{region}/{service}/aws4_request");
        let text = format!(
            "AWS4-HMAC-SHA256\n{date}\n{scope}\n{}",
            HEXLOWER.encode(digest(&SHA256, request.as_bytes()).as_ref())
        );
        let mut key = format!("AWS4{secret_key}").into_bytes();
        for part in scope.split('/') {
            key = hmac(&key, part);
        }
        let signature = HEXLOWER.encode(&hmac(&key, &text));
        format!("AWS4-HMAC-SHA256 Credential={access_key}/{scope}, SignedHeaders={names}, Signature={signature}")
    }
}

/// Return the hash of a body. `None`: the body is not in memory.
pub fn content_hash(body: Option<&[u8]>) -> String {
    body.map_or_else(|| UNSIGNED.to_owned(), |body| HEXLOWER.encode(digest(&SHA256, body).as_ref()))
}

fn hmac(key: &[u8], text: &str) -> Vec<u8> {
    sign(&Key::new(HMAC_SHA256, key), text.as_bytes()).as_ref().to_vec()
}

/// Return the parameters in the encoding of AWS and in order.
fn canonical_query(query: &str) -> String {
    let encoded = |text: &str| {
        let decoded = percent_decode_str(text).decode_utf8_lossy();
        utf8_percent_encode(&decoded, ENCODED).to_string()
    };
    let parameters = query.split('&').filter(|parameter| !parameter.is_empty()).map(|parameter| {
        let (name, value) = parameter.split_once('=').unwrap_or((parameter, ""));
        (encoded(name), encoded(value))
    });
    let mut parameters: Vec<_> = parameters.collect();
    parameters.sort_unstable();
    parameters.iter().map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>().join("&")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 2015-08-30T12:36:00Z, the time of AWS's test suite.
    const NOW_US: u64 = 1_440_938_160_000_000;
    const DATE_TEXT: &str = "20150830T123600Z";
    const EMPTY: &str = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";

    fn signer(service: &str, token: Option<&'static str>) -> AwsSigner {
        AwsSigner {
            access_key: "AKIDEXAMPLE".into(),
            secret_key: "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY".into(),
            session_token: token.map(HeaderValue::from_static),
            region: "us-east-1".into(),
            service: service.into(),
        }
    }

    /// The signatures of `get-vanilla`, `post-vanilla` and `get-vanilla-query-order-key-case` in AWS's test suite.
    #[test]
    fn signatures_of_the_test_suite_of_aws_are_computed() {
        let header = |text: &'static str| HeaderValue::from_static(text);
        let signed = [("host", header("example.amazonaws.com")), (DATE, header(DATE_TEXT))];
        for (method, uri, expected) in [
            (Method::GET, "/", "5fa00fa31553b73ebf1942676e86291e8372ff2a2260956d9b8aae1d763fbf31"),
            (Method::POST, "/", "5da7c1a2acd57cee7505fc6676e4e544621c30862966e37dddb68e92efbe5d6b"),
            (
                Method::GET,
                "/?Param2=value2&Param1=value1",
                "b97d918cfa904a5beff61c982a1b6f458b799221646efd99d3219ec94cdf2500",
            ),
        ] {
            let authorization =
                signer("service", None).authorization(&method, &Uri::from_static(uri), &signed, EMPTY, DATE_TEXT);
            assert_eq!(
                authorization,
                format!(
                    "AWS4-HMAC-SHA256 Credential=AKIDEXAMPLE/20150830/us-east-1/service/aws4_request, \
                     SignedHeaders=host;x-amz-date, Signature={expected}"
                )
            );
        }
    }

    /// The signatures are those of botocore 1.44.8 for the same requests.
    #[test]
    fn requests_to_bedrock_and_s3_are_signed_like_the_sdk_does() {
        let mut headers = HeaderMap::new();
        headers.insert(HOST, HeaderValue::from_static("bucket.s3.us-east-1.amazonaws.com"));
        let hash = content_hash(Some(b"{\"messages\":[]}"));
        signer("s3", None).sign(&Method::PUT, &Uri::from_static("/a%20b%24c"), &mut headers, &hash, NOW_US);
        let authorization = headers[AUTHORIZATION].to_str().unwrap();
        let expected = "e798cc439d26331cdafadf04174c97243f9f142ebbc044c327b5961a13afc842";
        assert!(authorization.ends_with(&format!("Signature={expected}")), "{authorization}");
        for (uri, token, expected) in [
            (
                "/model/anthropic.claude-v2%3A1/converse?b=1&a=x%20y&a=",
                None,
                "57d0611cc82b19439ab3ff3a215f7d165c7daa57e0c7384527d4c6d236d90ec9",
            ),
            (
                "/model/anthropic.claude-v2%3A1/converse-stream",
                Some("TOKEN"),
                "6c09c18838b0c0c67619c962a2ff3ad63f0e321130ca4e9e5e70f120539309d3",
            ),
        ] {
            let mut headers = HeaderMap::new();
            headers.insert(HOST, HeaderValue::from_static("bedrock-runtime.us-east-1.amazonaws.com"));
            headers.insert(SESSION_TOKEN, HeaderValue::from_static("of the client"));
            headers.insert("x-amz-target", HeaderValue::from_static("of the client"));
            headers.insert(AUTHORIZATION, HeaderValue::from_static("Bearer key"));
            let hash = content_hash(Some(b"{\"messages\":[]}"));
            signer("bedrock", token).sign(&Method::POST, &Uri::from_static(uri), &mut headers, &hash, NOW_US);
            let authorization = headers[AUTHORIZATION].to_str().unwrap();
            assert!(authorization.ends_with(&format!("Signature={expected}")), "{uri} {authorization}");
            assert_eq!((headers.get("x-amz-target"), headers.get_all(AUTHORIZATION).iter().count()), (None, 1));
            assert_eq!(headers.get(SESSION_TOKEN).map(|value| value.to_str().unwrap()), token);
        }
        let mut headers = HeaderMap::new();
        signer("s3", None).sign(&Method::PUT, &Uri::from_static("/a"), &mut headers, &content_hash(None), NOW_US);
        assert_eq!(headers[CONTENT_HASH], UNSIGNED);
        assert!(!format!("{:?}", signer("s3", Some("TOKEN"))).contains("wJalr"));
    }
}
