// Reads the golden vectors as the C++ example reads messages: vectors FOLDER. Prints what did not agree and what it
// left out.
#include <fstream>
#include <iostream>

#include "bus.hpp"

static json load(const std::string& path) {
    std::ifstream file(path);
    return json::parse(file);
}

static std::string bytes(const std::string& hex) {
    std::string raw;
    for (size_t at = 0; at + 1 < hex.size(); at += 2) raw.push_back(char(std::stoi(hex.substr(at, 2), nullptr, 16)));
    return raw;
}

// What JSON can not hold stands as {"$int": digits} and {"$bin": hex} in the files.
static json plain(const json& value) {
    if (value.is_object() && value.contains("$int")) {
        const std::string digits = value["$int"];
        return digits[0] == '-' ? json(std::stoll(digits)) : json(std::stoull(digits));
    }
    if (value.is_object() && value.contains("$bin")) {
        const std::string raw = bytes(value["$bin"]);
        return json::binary({raw.begin(), raw.end()});
    }
    json made = value;
    if (made.is_structured())
        for (json& one : made) one = plain(one);
    return made;
}

// Every field that is known is there with its value; a field from tomorrow is passed over.
static bool agrees(const json& expected, const json& got) {
    size_t known = 0;
    for (const auto& [key, value] : got.items())
        if (expected.contains(key) && ++known && expected[key] != value) return false;
    return known > 0;
}

int main(int, char** argv) {
    const std::string folder = argv[1];
    std::vector<std::string> wrong, left_out;
    std::map<std::string, json> maps;
    for (const json& one : load(folder + "/messages.json")) {
        const json expected = maps[one["name"]] = plain(one["map"]);
        if (read(bytes(one["hex"])) != expected) wrong.push_back(one["name"]);
    }
    for (const json& one : load(folder + "/variants.json")) {
        const std::optional<json> got = read(bytes(one["hex"]));
        if (!got || !agrees(maps.at(one["equals"]), *got)) wrong.push_back(one["name"]);
    }
    for (const json& one : load(folder + "/rejected.json"))
        if (!read(bytes(one["hex"]))) left_out.push_back(one["name"]);
    std::cout << json{{"messages", maps.size()}, {"wrong", wrong}, {"left_out", left_out}} << std::endl;
}
